"""What a cluster was asked for, checked: settings, models, placement, tiers, and the configuration of each
process."""
