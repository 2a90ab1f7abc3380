//! The parameters of a statement. The driver cannot bind `:name`, and it binds NULL without a word where a value is missing. So
//! each `:name` becomes a plain `?` with one value for each occurrence, and SQLite's own count of parameters must equal ours.

/// A statement as SQLite gets it, and the name of each `?`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scanned {
    pub sql: String,
    pub names: Vec<String>,
    /// The first word, in capitals.
    pub keyword: String,
}

/// # Errors
/// What the text must not have: another kind of parameter, a second statement, no statement at all.
pub fn scan(text: &str) -> Result<Scanned, String> {
    let mut scanned = Scanned { sql: String::with_capacity(text.len()), names: Vec::new(), keyword: String::new() };
    let mut rest = text;
    let mut ended = false;
    while let Some((token, after)) = next(rest) {
        rest = after;
        match token {
            Token::Blank(_) | Token::End if ended => {}
            _ if ended => return Err("it has more than one statement; write one [[route.sql]] for each".to_owned()),
            Token::End => ended = true,
            Token::Blank(blank) => scanned.sql.push_str(blank),
            Token::Parameter(name) => {
                scanned.sql.push('?');
                scanned.names.push(name.to_owned());
            }
            Token::OtherParameter(found) => {
                return Err(format!("{found:?} is not a parameter; write a name such as :id"));
            }
            Token::Word(word) => {
                if scanned.keyword.is_empty() {
                    scanned.keyword = word.to_ascii_uppercase();
                }
                scanned.sql.push_str(word);
            }
            Token::Other(other) => scanned.sql.push_str(other),
        }
    }
    if scanned.sql.contains('\0') {
        return Err("it has a NUL character".to_owned());
    }
    if scanned.keyword.is_empty() {
        return Err("it is empty".to_owned());
    }
    scanned.sql.truncate(scanned.sql.trim_end().len());
    // A comment at the end would reach into what follows.
    scanned.sql.push('\n');
    Ok(scanned)
}

/// A piece of a statement, as far as parameters and statements depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'t> {
    /// White space or a comment.
    Blank(&'t str),
    /// A keyword, a name without quotes, or a number.
    Word(&'t str),
    Parameter(&'t str),
    /// `?`, `?1`, `@name`, `$name`
    OtherParameter(&'t str),
    /// `;`
    End,
    /// A text or a name in quotes, or one other character.
    Other(&'t str),
}

/// The first token of `text`, and the rest.
pub fn next(text: &str) -> Option<(Token<'_>, &str)> {
    let first = text.chars().next()?;
    let cut = |length: usize| text.split_at(length);
    let quoted = |quote: char| {
        let (token, rest) = cut(quoted_length(text, quote));
        (Token::Other(token), rest)
    };
    Some(match first {
        ' ' | '\t' | '\n' | '\r' | '\x0c' => {
            let (blank, rest) = cut(1);
            (Token::Blank(blank), rest)
        }
        '-' if text.starts_with("--") => {
            let (blank, rest) = cut(text.find('\n').map_or(text.len(), |end| end + 1));
            (Token::Blank(blank), rest)
        }
        '/' if text.starts_with("/*") && text.len() > 2 => {
            let (blank, rest) = cut(text[2..].find("*/").map_or(text.len(), |end| end + 4));
            (Token::Blank(blank), rest)
        }
        '\'' | '"' | '`' => quoted(first),
        '[' => quoted(']'),
        ';' => (Token::End, cut(1).1),
        '?' => {
            let (token, rest) = cut(1 + text[1..].find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len() - 1));
            (Token::OtherParameter(token), rest)
        }
        ':' | '@' | '$' if text[1..].starts_with(is_part_of_name) => {
            let (token, rest) = cut(1 + name_length(&text[1..]));
            if rest.starts_with("::") || rest.starts_with('(') {
                // For SQLite, `:a::b` and `:a(b)` are names too.
                let (token, rest) = cut(token.len() + 1);
                return Some((Token::OtherParameter(token), rest));
            }
            (if first == ':' { Token::Parameter(&token[1..]) } else { Token::OtherParameter(token) }, rest)
        }
        ':' if text.starts_with(":::") => {
            let (token, rest) = cut(3);
            (Token::OtherParameter(token), rest)
        }
        _ if is_part_of_name(first) => {
            let (token, rest) = cut(name_length(text));
            (Token::Word(token), rest)
        }
        _ => {
            let (token, rest) = cut(first.len_utf8());
            (Token::Other(token), rest)
        }
    })
}

/// What SQLite takes for a part of a name: its `IdChar`.
fn is_part_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$' || !c.is_ascii()
}

fn name_length(text: &str) -> usize {
    text.find(|c: char| !is_part_of_name(c)).unwrap_or(text.len())
}

/// The length of what is in quotes, with the quotes. A quote that stands twice is a part of the text, except `]`.
fn quoted_length(text: &str, quote: char) -> usize {
    let mut from = 1;
    while let Some(end) = text[from..].find(quote).map(|end| from + end + 1) {
        if quote == ']' || !text[end..].starts_with(quote) {
            return end;
        }
        from = end + 1;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use sqlx::sqlite::SqliteConnectOptions;
    use sqlx::{AssertSqlSafe, ConnectOptions, Either, Executor, SqlSafeStr, Statement};

    use super::*;

    #[test]
    fn names_in_quotes_and_comments_are_not_parameters() {
        let scanned =
            scan("INSERT INTO \"a:b\" VALUES (:id, ':id', [c:d], `e:f`, 'it''s :x') -- :id\n/* :y */ ;; ").unwrap();
        assert_eq!(scanned.names, ["id"]);
        assert_eq!(scanned.keyword, "INSERT");
        assert_eq!(scan("select :payload->>'$.a', :n1, :é, :a+:a").unwrap().sql, "select ?->>'$.a', ?, ?, ?+?\n");
        for bad in [
            "",
            "  -- only a comment",
            "SELECT 1; SELECT 2",
            "SELECT ?",
            "SELECT ?1",
            "SELECT @a",
            "SELECT $a",
            "SELECT '\0'",
        ] {
            assert!(scan(bad).is_err(), "{bad:?}");
        }
    }

    const PIECES: &[&str] = &[
        "SELECT ", ":a", ":b", ":a1", ":é", "'", "''", "\"", "`", "[", "]", "--", "\n", "/*", "*/", "/", "*", "-", ";",
        "1", "2.5e3", "x'ab'", ",", " ", "::", ":", "+", "(", ")", "->>", "as c", "'t'", "\"q\"", "$", "a$b", "é",
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn sqlite_counts_the_parameters_that_we_count(pieces in vec(select(PIECES), 0..14)) {
            let text = format!("SELECT {}", pieces.concat());
            let Ok(scanned) = scan(&text) else { return Ok(()) };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let counts = runtime.block_on(async {
                let mut connection = SqliteConnectOptions::new().in_memory(true).connect().await.unwrap();
                let mut counts = Vec::new();
                for sql in [scanned.sql.clone(), text.clone()] {
                    let prepared = (&mut connection).prepare(AssertSqlSafe(sql).into_sql_str()).await;
                    counts.push(prepared.ok().map(|prepared| match prepared.parameters() {
                        Some(Either::Right(count)) => count,
                        Some(Either::Left(_)) | None => 0,
                    }));
                }
                counts
            });
            let mut names = scanned.names.clone();
            names.sort();
            names.dedup();
            if let Some(ours) = counts[0] {
                prop_assert_eq!(ours, scanned.names.len(), "{}", text);
            }
            // SQLite counts a name once. A text that it takes is one that it takes from us as well.
            if let Some(theirs) = counts[1] {
                prop_assert_eq!(theirs, names.len(), "{}", text);
                prop_assert!(counts[0].is_some(), "{}", text);
            }
        }
    }
}
