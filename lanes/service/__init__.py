"""``lanes run``: a consumer as a service of several worker processes under one supervisor.

Reading order: ``target`` (the named consumer), ``env_file`` (an environment file), ``logs`` (text or JSON), ``worker``
(a process and its connection to the supervisor), ``changes`` (changed files), ``port`` (the HTTP server),
``supervisor`` (starts, restarts and drains the workers).
"""
