"""What a trace saved, on its way out of the worker: encoding, streaming, and the outbox."""
