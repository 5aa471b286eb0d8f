"""Pictures of results that are made up, for models of any size."""
