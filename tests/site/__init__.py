"""How the site of the documentation is made: `mkdocs.yml` says what it calls of this."""
