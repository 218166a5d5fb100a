"""The load generator behind `octavo bench`: data, requests, reports. It knows servers by their HTTP alone."""
