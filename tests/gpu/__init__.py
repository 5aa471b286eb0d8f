"""What runs on a GPU only."""
