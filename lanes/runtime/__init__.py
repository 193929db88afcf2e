"""One run of a consumer: from the first message to the last release.

Reading order: ``run``, ``settle``, ``handover``, ``dead_lettering``, ``attempts``, ``contract_checks``.
"""
