"""Which controller gets a request. Pure: all that is known comes in as arguments, and so does the time.

      KvEvents ──► index.py: which chunks each controller has ─────────┐
      State ─────► controllers.py: what each has to do, who has failed ┼─► policies.py ──► Decision
      request ───► names.py: its chunks ───────────────────────────────┘

`core.py` puts them together.
"""
