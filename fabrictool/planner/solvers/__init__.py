"""Ways to place replicas, behind one protocol (`fabrictool.planner.problem.Solver`)."""
