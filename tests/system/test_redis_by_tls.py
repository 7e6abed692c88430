"""The chart's start script with the operating system's redis-server, which speaks TLS: probes, trust, Sentinels, a whole run."""
