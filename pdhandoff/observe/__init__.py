"""What happened, and when: recordings that Perfetto reads, timeline pictures, counters."""
