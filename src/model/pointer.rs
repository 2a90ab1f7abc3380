//! Values at several JSON pointers (RFC 6901), found in one pass. They stay raw text: a number keeps every digit.

use std::fmt;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The pointers, as a tree.
#[derive(Clone, Debug, Default)]
pub struct Pointers {
    root: Node,
    count: usize,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// The pointers that end here.
    ends: Vec<usize>,
    children: Vec<(String, Node)>,
}

/// Whether a text is a pointer to a part of a document.
pub fn is_pointer(text: &str) -> bool {
    text.starts_with('/') && text.split('~').skip(1).all(|after| after.starts_with(['0', '1']))
}

impl Pointers {
    /// Adds a pointer that [`is_pointer`] accepts, and returns its index.
    pub fn add(&mut self, pointer: &str) -> usize {
        let mut node = &mut self.root;
        for token in pointer.split('/').skip(1) {
            let token = token.replace("~1", "/").replace("~0", "~");
            let found = node.children.iter().position(|(name, _)| *name == token);
            let index = found.unwrap_or_else(|| {
                node.children.push((token, Node::default()));
                node.children.len() - 1
            });
            node = &mut node.children[index].1;
        }
        node.ends.push(self.count);
        self.count += 1;
        self.count - 1
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The value at each pointer, `None` if there is none. Of several members with one name, the last one counts.
    ///
    /// # Errors
    /// If the document is not JSON.
    pub fn find<'d>(&self, document: &'d [u8]) -> serde_json::Result<Vec<Option<&'d RawValue>>> {
        let document: &RawValue = serde_json::from_slice(document)?;
        let mut found = vec![None; self.count];
        self.root.find(document, &mut found)?;
        Ok(found)
    }
}

impl Node {
    fn find<'d>(&self, value: &'d RawValue, found: &mut [Option<&'d RawValue>]) -> serde_json::Result<()> {
        self.ends.iter().for_each(|end| found[*end] = Some(value));
        if self.children.is_empty() {
            return Ok(());
        }
        let mut deserializer = serde_json::Deserializer::from_str(value.get());
        let members = match value.get().as_bytes().first() {
            Some(b'{') => deserializer.deserialize_map(Members(self))?,
            Some(b'[') => deserializer.deserialize_seq(Members(self))?,
            _ => return Ok(()),
        };
        for ((_, child), member) in self.children.iter().zip(members) {
            if let Some(member) = member {
                child.find(member, found)?;
            }
        }
        Ok(())
    }
}

/// Reads the members of an object or an array that the children of a node name.
struct Members<'n>(&'n Node);

impl<'d> Visitor<'d> for Members<'_> {
    type Value = Vec<Option<&'d RawValue>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'d>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = vec![None; self.0.children.len()];
        while let Some(child) = map.next_key_seed(Name(self.0))? {
            match child {
                Some(child) => members[child] = Some(map.next_value()?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(members)
    }

    fn visit_seq<A: SeqAccess<'d>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let children = &self.0.children;
        // An index is digits without a sign and without zeros before it (RFC 6901, section 4).
        let index = |name: &str| name.parse().ok().filter(|index: &usize| index.to_string() == name);
        let indices: Vec<Option<usize>> = children.iter().map(|(name, _)| index(name)).collect();
        let mut members = vec![None; children.len()];
        let mut at = 0;
        while let Some(member) = seq.next_element()? {
            for (place, index) in members.iter_mut().zip(&indices) {
                if *index == Some(at) {
                    *place = Some(member);
                }
            }
            at += 1;
        }
        Ok(members)
    }
}

/// Finds the child that a name stands for, without a copy of the name.
struct Name<'n>(&'n Node);

impl<'d> DeserializeSeed<'d> for Name<'_> {
    type Value = Option<usize>;

    fn deserialize<D: serde::Deserializer<'d>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.0.children.iter().position(|(child, _)| child == name))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use serde_json::{Value, json};

    use super::*;

    fn found<'d>(pointers: &[&str], document: &'d str) -> Vec<Option<&'d str>> {
        let mut tree = Pointers::default();
        pointers.iter().enumerate().for_each(|(index, pointer)| assert_eq!(tree.add(pointer), index));
        tree.find(document.as_bytes()).unwrap().into_iter().map(|value| value.map(RawValue::get)).collect()
    }

    #[test]
    fn values_stay_as_written_and_the_last_of_one_name_counts() {
        let document =
            r#"{"a": {"x": 1}, "n": 90071992547409931234, "l": [1.50, {"y": "é"}], "a": {"z": 2}, "\u006e2": 1e400}"#;
        assert_eq!(
            found(&["/n", "/l/0", "/l/1/y", "/a", "/a/x", "/n2", "/l/00", "/l/-", "/n", "/n/1"], document),
            [
                Some("90071992547409931234"),
                Some("1.50"),
                Some("\"é\""),
                Some("{\"z\": 2}"),
                None,
                Some("1e400"),
                None,
                None,
                Some("90071992547409931234"),
                None
            ]
        );
        for bad in ["", "Order Data 3", "{\"a\":1", "{\"a\":1}x", "{a:1,}"] {
            assert!(Pointers::default().find(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    const KEYS: &[&str] = &["a", "", "/", "~", "~1", "0", "1", "00", "+1", "-", "é\""];

    fn json_values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(|number| json!(number)),
            ".{0,3}".prop_map(Value::String)
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..4).prop_map(Value::Array),
                vec((select(KEYS), inner), 0..4)
                    .prop_map(|members| members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]

        #[test]
        fn each_pointer_finds_what_rfc_6901_says(document in json_values(), paths in vec(vec(select(KEYS), 1..4), 0..6)) {
            let pointers: Vec<String> = paths
                .iter()
                .map(|path| path.iter().map(|key| format!("/{}", key.replace('~', "~0").replace('/', "~1"))).collect())
                .collect();
            let pointers: Vec<&str> = pointers.iter().map(String::as_str).collect();
            prop_assert!(pointers.iter().all(|pointer| is_pointer(pointer)));
            let text = document.to_string();
            let found = found(&pointers, &text);
            for (pointer, found) in pointers.iter().zip(found) {
                prop_assert_eq!(found.map(|raw| serde_json::from_str(raw).unwrap()), document.pointer(pointer).cloned());
            }
        }

        #[test]
        fn no_document_makes_it_panic(document in vec(any::<u8>(), 0..30)) {
            let mut tree = Pointers::default();
            tree.add("/a/0");
            drop(tree.find(&document));
        }
    }
}
