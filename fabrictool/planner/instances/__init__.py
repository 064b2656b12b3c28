"""Problems from elsewhere, and made-up ones."""
