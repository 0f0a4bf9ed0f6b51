"""Hosts: the actors that own a prefill group or a decode worker and outlive the controller that commands them."""
