"""Names of other tools over a served model."""
