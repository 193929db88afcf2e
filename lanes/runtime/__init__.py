"""One run of a consumer: from the first message to the last release.

Reading order: ``consumer_arguments``, ``lifecycle`` (the life of a consumer around its run), ``run``, ``cancellation``,
``settle``, ``handover``, ``survivors``, ``deliveries``, ``dead_lettering``, ``publishing``, ``attempts``,
``confirmation``, ``contract_checks``; and ``garbage`` (the garbage collector during a run).
"""
