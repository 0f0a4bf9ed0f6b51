"""The service over HTTP: completions, chat and prefill jobs for clients, health and metrics for operators."""
