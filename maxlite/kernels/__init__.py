"""Operations with several implementations each: a folder with its api, oracle and backends."""
