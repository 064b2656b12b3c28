"""What should run where, and why: pure. Problem → solver → placement → diff → plan."""
