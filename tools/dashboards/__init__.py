"""Writes the Grafana dashboards in `dashboards/grafana`: `python -m tools.dashboards`."""
