"""The Spark commands of ``lanes``.

Reading order: ``commands``, ``options``, ``audit``, ``doctor``, ``doctor_command``, ``stream``,
``machine``, ``connector``, ``progress_bar``.
"""
