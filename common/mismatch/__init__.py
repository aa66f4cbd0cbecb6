"""How far the sparse actor is from the dense policy: acceptance rates, controller, alarms."""
