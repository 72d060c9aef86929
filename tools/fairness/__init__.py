"""Whether one key can make another one wait: time to the first token, alone and beside an attacker."""
