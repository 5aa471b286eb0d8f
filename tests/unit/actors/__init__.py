"""The actors without Ray: sessions, event logs, replicas and the directory."""
