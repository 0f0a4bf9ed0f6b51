"""What chaos_service and overload_service share."""
