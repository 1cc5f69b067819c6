"""Values that cross rooms: graph, program, schedule, records, costs, errors. Imports neither torch nor anything above."""
