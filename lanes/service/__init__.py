"""``lanes run``: a consumer as a service of several worker processes under one supervisor.

Reading order: ``target`` (the named consumer), ``env_file`` (its environment), ``logs`` (text or JSON), ``worker`` (a
process and its link to the supervisor), ``changes`` (of files), ``port`` (over HTTP), ``supervisor`` (starts, restarts
and drains the workers).
"""
