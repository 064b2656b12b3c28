"""From what a site says about itself to the section of an inventory that describes it."""
