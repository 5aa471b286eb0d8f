"""The reference pages of the documents, from the settings and the commands' parsers."""
