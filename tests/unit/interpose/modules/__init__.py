"""The served model's modules as a notebook sees them."""
