"""Operations with several implementations: one folder each, with api, reference and backends."""
