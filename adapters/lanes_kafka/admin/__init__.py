"""Questions to a broker and confirmed writes to it, outside the consuming client.

Reading order: ``questions``, ``asking``, ``broker``, ``producing``.
"""
