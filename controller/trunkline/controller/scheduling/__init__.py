"""Which requests run in the next step: the queue, the scheduler, encoding of modules. Pure."""
