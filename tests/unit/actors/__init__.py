"""The actors without Ray: sessions, recordings, replicas and the directory."""
