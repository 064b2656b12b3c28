"""Pure decisions of replicas that merge into one with more parallelism while they answer, and split again.

Source: Flying Serving. What a replica holds stays where it is: weights are seen through narrower views, and a block of
cache that holds some tokens of all heads for one replica holds more tokens of fewer heads for a group.
"""
