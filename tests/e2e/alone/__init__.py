"""Services of their own, each for one file; they come and go before the service is there that other files share."""
