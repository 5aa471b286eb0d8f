"""What operators see of a service: metrics, records of traces, the audit log, and spans."""
