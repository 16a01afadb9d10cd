"""Which controller gets a request. Pure: what is known comes in as arguments, and so does the time.

      KvEvents ──► index.py: which chunks each controller has ─┐
      State ─────► loads.py: what each has to do ──────────────┤
                   breaker.py: which of them have just failed ─┼─► policies.py ──► Decision
      request ───► names.py: its chunks ───────────────────────┤
                      loads.py: where its session was ─────────┘

`core.py` puts them together.
"""
