"""The build of the documentation's site; `mkdocs.yml` names the hooks of this folder."""
