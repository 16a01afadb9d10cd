"""The choice of the controller that gets a request. Pure: all knowledge and the time come in as arguments.

      KvEvents ──► index.py: which chunks each controller has ─────────┐
      State ─────► controllers.py: what each has to do, who has failed ┼─► policies.py ──► Decision
      request ───► names.py: its chunks ───────────────────────────────┘

`core.py` puts them together.
"""
