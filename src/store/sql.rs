//! Texts of statements over many rows, for the stores and for handlers.

/// Rows in one statement at most. A longer statement saves little, and its megabytes stay in the driver's cache. SQLite allows
/// 32,766 variables in a statement.
pub const ROWS_MAX: usize = 1000;

/// Cuts `rows` into runs of [`ROWS_MAX`], and the rest into runs whose lengths are powers of two. So a few statement texts serve
/// every batch and stay in the driver's cache.
pub fn chunks<T>(mut rows: &[T]) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let length = match rows.len() {
            0 => return None,
            ROWS_MAX.. => ROWS_MAX,
            length => 1 << length.ilog2(),
        };
        let (chunk, rest) = rows.split_at(length);
        rows = rest;
        Some(chunk)
    })
}

/// `before (?,?),(?,?) after`
pub fn values(before: &str, columns: usize, rows: usize, after: &str) -> String {
    let row = format!("({}),", vec!["?"; columns].join(","));
    let rows = row.repeat(rows);
    format!("{before}{}{after}", rows.strip_suffix(',').unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_hold_every_row_once_in_few_lengths() {
        for count in 0..2_100 {
            let rows: Vec<usize> = (0..count).collect();
            let lengths: Vec<usize> = chunks(&rows).map(<[usize]>::len).collect();
            assert_eq!(chunks(&rows).flatten().copied().collect::<Vec<_>>(), rows);
            assert!(lengths.iter().all(|length| *length == ROWS_MAX || length.is_power_of_two()), "{lengths:?}");
        }
    }

    #[test]
    fn values_are_lists_of_question_marks() {
        assert_eq!(values("VALUES ", 2, 3, ";"), "VALUES (?,?),(?,?),(?,?);");
    }
}
