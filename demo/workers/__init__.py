"""The processes of the demo: workers under ``lanes``, a serial loop without ``lanes``, and their services.

Reading order: ``handler``, ``client``, ``service``, ``worker``, ``serial``, ``sample``, ``pace``.
"""
