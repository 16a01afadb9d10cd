"""The `trunkline` command and its subcommands."""
