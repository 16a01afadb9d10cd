"""Checked settings of a cluster, and what follows from them: models, placement, tiers, the configuration of each
process."""
