"""The processes of the demo: workers under ``lanes``, the loop without it, and what both call.

Reading order: ``handler``, ``client``, ``service``, ``worker``, ``serial``, ``sample``, ``pace``.
"""
