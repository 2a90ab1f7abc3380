//! Subjects with wildcards, as the server matches them.

/// A subject in which `*` stands for one token and a `>` at the end for one or more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectPattern(String);

impl std::str::FromStr for SubjectPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let tokens: Vec<&str> = text.split('.').collect();
        let misplaced =
            |(index, token): (usize, &&str)| token.is_empty() || (*token == ">" && index + 1 < tokens.len());
        if tokens.iter().enumerate().any(misplaced) {
            return Err("a subject such as ORDERS.new, ORDERS.* or ORDERS.>".to_owned());
        }
        Ok(Self(text.to_owned()))
    }
}

impl SubjectPattern {
    pub fn matches(&self, subject: &str) -> bool {
        let mut subject = subject.split('.');
        for token in self.0.split('.') {
            match (token, subject.next()) {
                (_, None) => return false,
                (">", Some(_)) => return true,
                ("*", Some(_)) => {}
                (token, Some(there)) if token == there => {}
                (_, Some(_)) => return false,
            }
        }
        subject.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_are_those_of_the_server() {
        let matches = |pattern: &str, subject: &str| pattern.parse::<SubjectPattern>().unwrap().matches(subject);
        for (pattern, subject) in [
            ("ORDERS.new", "ORDERS.new"),
            ("ORDERS.*", "ORDERS.new"),
            ("*.new", "ORDERS.new"),
            ("ORDERS.>", "ORDERS.eu.new"),
            (">", "x"),
        ] {
            assert!(matches(pattern, subject), "{pattern} {subject}");
        }
        for (pattern, subject) in [
            ("ORDERS.new", "ORDERS.New"),
            ("ORDERS.*", "ORDERS"),
            ("ORDERS.*", "ORDERS.eu.new"),
            ("ORDERS.>", "ORDERS"),
        ] {
            assert!(!matches(pattern, subject), "{pattern} {subject}");
        }
        for bad in ["", "ORDERS.", ".new", ">.new", "a..b"] {
            assert!(bad.parse::<SubjectPattern>().is_err(), "{bad}");
        }
    }
}
