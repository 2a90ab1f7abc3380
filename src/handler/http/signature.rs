//! The signature of Standard Webhooks: `v1,` and the HMAC-SHA256 of id, time and body, one for each secret.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, PAD};
use ring::hmac::{self, HMAC_SHA256};

/// Secrets are issued with and without padding.
const BASE64: GeneralPurpose =
    GeneralPurpose::new(&STANDARD, PAD.with_decode_padding_mode(DecodePaddingMode::Indifferent));
const PREFIX: &str = "whsec_";
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// The keys of a secret file. `Debug` prints none of them.
#[derive(Clone)]
pub(super) struct Keys(Vec<hmac::Key>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    /// One secret a line.
    ///
    /// # Errors
    /// What is wrong. The text does not repeat the secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
        let keys: Result<Vec<_>, String> = lines.map(|(index, line)| key(line, index + 1)).collect();
        match keys {
            Ok(keys) if keys.is_empty() => Err("is empty".to_owned()),
            Ok(keys) => Ok(Self(keys)),
            Err(problem) => Err(problem),
        }
    }

    /// The value of `Webhook-Signature`. The receiver accepts any of the signatures, so a secret can be replaced without a gap.
    pub fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        let sign = |key: &hmac::Key| {
            let mut context = hmac::Context::with_key(key);
            context.update(format!("{id}.{timestamp}.").as_bytes());
            context.update(body);
            format!("v1,{}", BASE64.encode(context.sign()))
        };
        self.0.iter().map(sign).collect::<Vec<_>>().join(" ")
    }
}

fn key(line: &str, number: usize) -> Result<hmac::Key, String> {
    let secret = line.strip_prefix(PREFIX).and_then(|secret| BASE64.decode(secret).ok());
    match secret {
        Some(secret) if SECRET_BYTES.contains(&secret.len()) => Ok(hmac::Key::new(HMAC_SHA256, &secret)),
        Some(_) | None => Err(format!(
            "has in line {number} no secret of the form {PREFIX} and the base64 of {} to {} bytes",
            SECRET_BYTES.start(),
            SECRET_BYTES.end()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    /// The vector in the tests of the reference library for Python.
    #[test]
    fn the_signature_is_that_of_the_reference_library() {
        let keys = Keys::parse(SECRET).unwrap();
        let signature = keys.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn each_line_is_a_signature() {
        let keys = Keys::parse(&format!("{SECRET}\r\n\nwhsec_{}\n", "A".repeat(32))).unwrap();
        let both = keys.sign("o-1", 1, b"");
        assert_eq!(both.split(' ').count(), 2);
        assert!(both.starts_with(&Keys::parse(SECRET).unwrap().sign("o-1", 1, b"")));
    }

    #[test]
    fn what_is_not_a_secret_is_named_by_its_line_alone() {
        for (text, problem) in [
            ("", "is empty"),
            ("\n\n", "is empty"),
            ("whsec_AAAA", "line 1"),
            ("topsecret", "line 1"),
            ("\nwhsec_?", "line 2"),
        ] {
            let seen = Keys::parse(text).unwrap_err();
            assert!(seen.contains(problem) && !seen.contains("topsecret"), "{text:?}: {seen}");
        }
    }
}
