//! The bytes that the fuzzer was started with or tripped over, through the same checks: they stay useful without a fuzzer.

use std::path::Path;

#[path = "../../fuzz/checks.rs"]
mod checks;

fn each_seed_of(target: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let mut seeds = 0;
    for seed in std::fs::read_dir(&folder).unwrap() {
        let path = seed.unwrap().path();
        // Shown only if the check fails.
        println!("{}", path.display());
        check(&std::fs::read(path).unwrap());
        seeds += 1;
    }
    assert!(seeds >= 5, "{seeds} seeds in {}", folder.display());
}

#[test]
fn kept_seeds_of_deliveries_have_one_id_each() {
    each_seed_of("delivery", checks::delivery);
}

#[test]
fn kept_seeds_of_stored_messages_are_judged() {
    each_seed_of("quarantine", checks::quarantine);
}

#[test]
fn kept_seeds_of_settings_are_refused_by_name_or_mean_what_is_printed() {
    each_seed_of("config", checks::config);
}
