"""Jobs that survive: a supervisor on each host watches its ranks, and after a failure all of them start again together.

    host a: supervisor ── ranks 0, 1 ──┐  copies of the state in memory, here and at partners
    host b: supervisor ── ranks 2, 3 ──┘
              │ a store: leases, causes, facts, decisions

See ``supervisor.supervise``.
"""
