"""Pure decisions of nodes that several models share: whose turn it is, what still fits, and where a request goes.

Source: LLM-Mesh. The same code decides in the simulator and, driven by real iterations, beside an engine.
"""
