"""What happened: tables, transitions, reads. Knows neither who asks nor who computes."""
