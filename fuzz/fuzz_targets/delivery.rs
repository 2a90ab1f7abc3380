#![no_main]

#[path = "../checks.rs"]
#[allow(dead_code, reason = "each target has its own part")]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| checks::delivery(bytes));
