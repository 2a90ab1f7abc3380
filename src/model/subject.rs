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

    /// Whether there is a subject that both match.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (mut ours, mut theirs) = (self.0.split('.'), other.0.split('.'));
        loop {
            match (ours.next(), theirs.next()) {
                (None, None) => return true,
                (None, Some(_)) | (Some(_), None) => return false,
                (Some(">"), Some(_)) | (Some(_), Some(">")) => return true,
                (Some("*"), Some(_)) | (Some(_), Some("*")) => {}
                (Some(our), Some(their)) if our == their => {}
                (Some(_), Some(_)) => return false,
            }
        }
    }

    /// Whether each subject that `other` matches is one that this pattern matches.
    pub fn covers(&self, other: &Self) -> bool {
        let mut others = other.0.split('.');
        for token in self.0.split('.') {
            match (token, others.next()) {
                (_, None) => return false,
                (">", Some(_)) => return true,
                ("*", Some(there)) if there != ">" => {}
                (token, Some(there)) if token == there => {}
                (_, Some(_)) => return false,
            }
        }
        others.next().is_none()
    }
}

impl std::fmt::Display for SubjectPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_overlap_if_a_subject_matches_both() {
        let overlap = |one: &str, other: &str| {
            let [one, other]: [SubjectPattern; 2] = [one, other].map(|text| text.parse().unwrap());
            assert_eq!(one.overlaps(&other), other.overlaps(&one));
            one.overlaps(&other)
        };
        for (one, other) in
            [("a.*", "a.b"), ("a.*.c", "*.b.c"), ("a.>", "a.b.c"), (">", "a"), ("a.b.>", "a.*.c"), ("a", "a")]
        {
            assert!(overlap(one, other), "{one} {other}");
        }
        for (one, other) in [("a.*", "b.*"), ("a.>", "a"), ("a.*", "a.b.c"), ("a.b", "a.c"), ("a", "A")] {
            assert!(!overlap(one, other), "{one} {other}");
        }
    }

    #[test]
    fn a_pattern_covers_what_matches_no_more_than_it_does() {
        let patterns = ["A", "A.*", "A.>", "A.b", "*.b", "*.*", ">", "A.b.>", "A.*.c", "*.>"];
        let subjects = ["A", "A.b", "A.c", "B.b", "A.b.c", "A.x.c", "A.b.c.d", "B"];
        for one in patterns {
            for other in patterns {
                let [one, other] = [one, other].map(|pattern| pattern.parse::<SubjectPattern>().unwrap());
                let all = subjects.iter().filter(|subject| other.matches(subject)).all(|subject| one.matches(subject));
                assert!(all || !one.covers(&other), "{one} {other}");
            }
        }
        let covers = |one: &str, other: &str| {
            one.parse::<SubjectPattern>().unwrap().covers(&other.parse::<SubjectPattern>().unwrap())
        };
        for (one, other) in [(">", ">"), ("A.*", "A.b"), ("A.>", "A.*"), ("A.>", "A.b.>"), ("*.*", "A.*")] {
            assert!(covers(one, other) && (one == other || !covers(other, one)), "{one} {other}");
        }
        assert!(!covers("A.*", "A.>") && !covers("A.b", "A.*") && !covers("A.>", "A"));
    }

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
