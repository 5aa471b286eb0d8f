"""One engine as a replica uses it: traces become requests, and their outputs become events."""
